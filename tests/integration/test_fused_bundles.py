"""Bundles with fused ops: a second process compiles nothing, imports little, and runs code that was made here only."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

import gascompile
from gascompile.core.serial import raw_digest
from tests import zoo
from tests.integration.fused_models import ALWAYS, Gated, assert_close
from tests.zoo import eager

NO_COMPILER = """
import os, subprocess, sys
os.environ["PATH"] = ""
os.environ["GASCOMPILE_CACHE_DIR"] = {cache!r}
import torch, gascompile
from safetensors.torch import load_file

class Refuse:
    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.names):
            raise AssertionError(f"imports {{name}}")

def refuse(*args, **kwargs):
    raise AssertionError(f"starts {{args}}")

SOLVERS = ("pulp", "highspy", "networkx")

def no_compiler(*names):
    subprocess.Popen.__init__ = refuse
    sys.meta_path.insert(0, Refuse(*names))
    assert not [name for name in sys.modules if name.startswith(names)]

"""


def in_a_process(cache: Path, root: Path, code: str) -> None:
    script = NO_COMPILER.format(cache=str(cache)) + textwrap.dedent(code)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)


def test_a_second_process_compiles_nothing(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path, root: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    with gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.compile_s > 0
        save_file({"x": rows["x"], "wanted": compiled(**rows)}, tmp_path / "io.safetensors")
        save_file(gated.state_dict(), tmp_path / "weights.safetensors")
        compiled.save(bundle)
    same = f"""
        io = load_file({str(tmp_path / "io.safetensors")!r})
        assert torch.equal(compiled(x=io["x"]), io["wanted"])
        assert compiled.fused.num_ops > 0 and compiled.fused.compile_s == 0, compiled.fused
        """
    in_a_process(
        cache,
        root,
        f"""
        no_compiler("torch._inductor", "torch._dynamo.", *SOLVERS, "transformers.")
        compiled = gascompile.load({str(bundle)!r})
        {same}""",
    )
    in_a_process(
        cache,
        root,
        f"""
        from tests.integration.fused_models import ALWAYS, Gated
        no_compiler("torch._inductor.graph", "torch._inductor.codegen.cpp")
        model = Gated().eval()
        model.load_state_dict(load_file({str(tmp_path / "weights.safetensors")!r}))
        x = {{"x": torch.zeros(3, 128)}}
        compiled = gascompile.compile(model, None, x, cache_dir={str(cache)!r}, **ALWAYS)
        {same}""",
    )


def test_output_types_are_imported_at_the_first_call_and_without_models(
    kernels: Path, root: Path, tmp_path: Path
) -> None:
    model, inputs = zoo.make("llama")
    with gascompile.compile(model, None, inputs, cache_dir=kernels, **ALWAYS) as compiled:
        values = {str(i): v.clone() for i, v in enumerate(pytree.tree_leaves(compiled(**inputs)))}
        save_file(values, tmp_path / "outputs.safetensors")
        save_file(inputs, tmp_path / "inputs.safetensors")
        (tmp_path / "spec").write_text(compiled.program.out_spec)
        compiled.save(tmp_path / "bundle")
    in_a_process(
        kernels,
        root,
        f"""
        from pathlib import Path
        from torch.utils import _pytree as pytree
        from gascompile.integrations.cache_argument import argument_in

        folder = Path({str(tmp_path)!r})
        inputs = load_file(folder / "inputs.safetensors")
        no_compiler("torch._inductor", "torch._dynamo.", *SOLVERS, "transformers.")
        compiled = gascompile.load(folder / "bundle")
        sys.meta_path[0].names = ("torch._inductor", "torch._dynamo.", "transformers.modeling_utils")
        outputs = compiled(**inputs)
        assert compiled.fused.num_ops > 0
        leaves, spec = pytree.tree_flatten(outputs)
        wanted = load_file(folder / "outputs.safetensors")
        assert len(leaves) == len(wanted)
        assert all(torch.equal(v, wanted[str(i)]) for i, v in enumerate(leaves))
        assert pytree.treespec_dumps(spec) == (folder / "spec").read_text()
        again = pytree.tree_unflatten(leaves, spec)
        assert type(again).__name__ == "CausalLMOutputWithPast"
        lengths = [getattr(one, argument_in(vars(one))).get_seq_length() for one in (again, outputs)]
        assert lengths[0] == lengths[1] > 0
        """,
    )


@pytest.fixture
def bundle(gated: Gated, rows: dict[str, torch.Tensor], kernels: Path, tmp_path: Path) -> Path:
    """Return a bundle with kernels that were compiled by somebody whose cache is ``kernels``."""
    with gascompile.compile(gated, None, rows, cache_dir=kernels, **ALWAYS) as compiled:
        compiled.save(tmp_path / "bundle")
    return tmp_path / "bundle"


def test_code_of_unknown_origin_is_not_run(
    bundle: Path,
    gated: Gated,
    rows: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="gascompile"), gascompile.load(bundle) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops == 0
        assert "allow_code=True" in loaded.fused.reason
        assert torch.equal(loaded(**rows), eager(gated, rows)[0])
    assert len([r for r in caplog.records if "one by one" in r.getMessage()]) == 1
    with gascompile.load(bundle, allow_code=True) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops > 0
        assert_close(loaded(**rows), eager(gated, rows))


@pytest.mark.parametrize("suffix", ["so", "json"])
def test_damaged_kernels_are_refused(bundle: Path, suffix: str) -> None:
    (file,) = bundle.glob(f"kernels-*.{suffix}")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(gascompile.FormatError, match="checksum differs"):
        gascompile.load(bundle, allow_code=True)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][file.name] = raw_digest(bytes(raw))
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(gascompile.FormatError, match=r"kernels .* are damaged"):
        gascompile.load(bundle, allow_code=True)


def test_kernels_for_another_processor_are_not_run(
    bundle: Path, gated: Gated, rows: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gascompile.codegen.build.processor_features", lambda: "older")
    with gascompile.load(bundle, allow_code=True) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops == 0
        assert "were made for processor" in loaded.fused.reason
        assert torch.equal(loaded(**rows), eager(gated, rows)[0])
