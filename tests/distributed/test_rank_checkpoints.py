"""Checkpoints of ranks: their parts, other numbers of ranks, DCP's own functions, and faults that all are told of."""

from __future__ import annotations

import errno
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gascompile import CheckpointError, StorageError, UnsupportedOpError
from gascompile.training.dcp import CheckpointReader, CheckpointWriter, consolidate
from gascompile.training.step import TrainingStep
from tests.distributed.checkpoint_worker import SCENARIO, one, whole_batches
from tests.distributed.jobs import loss_fn
from tests.distributed.test_ranks import close, left_by, run_forked_job

WORKER = "tests.distributed.checkpoint_worker"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, TrainingStep]]:
    """Return what two ranks have left, and three that went on from it, and a step of this process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    codes = run_forked_job(folder, 2, "saves", "dies", worker=WORKER)
    assert codes == [0, -signal.SIGKILL], log(folder)
    with one(folder, stage=None) as step:
        assert step.load(folder / "one") == {"number": 9}
        step.save(folder / "single", {"number": 1})
    assert run_forked_job(folder, 3, "loads", worker=WORKER) == [0, 0, 0], log(folder)
    with one(folder, stage=None) as step:
        yield folder, step


def log(folder: Path) -> str:
    return "".join(path.read_text()[-2000:] for path in folder.glob("log-*"))


@pytest.fixture(scope="module")
def eager() -> tuple[list[torch.Tensor], nn.Module]:
    """Return the losses of one process that updates after every second batch, and the model after three."""
    torch.manual_seed(0)
    model = SCENARIO.model()
    optimizer = SCENARIO.optimizer(model.parameters())
    losses, kept = [], SCENARIO.model()
    for number, batch in enumerate(whole_batches()):
        if number == 3:
            kept.load_state_dict(model.state_dict())
        loss = loss_fn(model, batch)
        loss.backward()
        losses.append(loss.detach())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, kept


Run = tuple[Path, TrainingStep]
Eager = tuple[list[torch.Tensor], nn.Module]


def found(run: Run, asked: str) -> list[dict[str, Any]]:
    return left_by(run[0], {"saves": 2, "loads": 3}[asked], asked)


def test_any_number_of_ranks_goes_on_with_one_process_s_losses(run: Run, eager: Eager) -> None:
    losses, _ = eager
    for rank in found(run, "saves"):
        close(rank["losses"], losses[:3])
        close(rank["next"], losses[3])
    for rank in found(run, "loads"):
        close(rank["losses"], losses[3:6])
        close(rank["single"], losses[3:5])
    folder, step = run
    # In the middle of an accumulation, whose sums are in the checkpoint.
    assert step.load(folder / "one") == {"number": 9}
    close([step(whole_batches()[number]) for number in (3, 4)], losses[3:5])
    assert step.load(folder / "three") == {"number": 3}
    close([step(whole_batches()[number]) for number in (6, 7)], losses[6:])


def test_each_rank_writes_its_parts_and_none_a_tensor_twice(run: Run) -> None:
    folder, _ = run
    checkpoint = max((folder / "one").glob("checkpoint-*"))
    files = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    names = [name for file in files for name in file]
    assert len(names) == len(set(names))
    shared = [{name for name in file if name.startswith("first.weight@")} for file in files]
    assert [len(own) for own in shared if own] == [1, 1]
    sizes = [sum(p.stat().st_size for p in checkpoint.glob(f"*-0000{n}-of-*")) for n in (1, 2)]
    assert max(sizes) < 1.05 * min(sizes)


def test_whole_parameters_are_files_that_any_reader_takes(run: Run) -> None:
    folder, _ = run
    (rank, *_) = found(run, "loads")
    assert "model.safetensors.index.json" in rank["names"]
    state: dict[str, torch.Tensor] = {}
    for path in (folder / "three").glob("checkpoint-*/model-*.safetensors"):
        state.update(load_file(path))
    for name, value in rank["state"]["model"].items():
        assert name == "again.weight" or torch.equal(state.pop(name), value)
    assert not state


def test_random_numbers_are_each_rank_s_own(run: Run) -> None:
    saved = [rank["random"] for rank in found(run, "saves")]
    assert not torch.equal(*saved)
    loaded = [rank["random"] for rank in found(run, "loads")]
    assert torch.equal(saved[0], loaded[0])
    assert torch.equal(saved[1], loaded[1])
    assert not any(torch.equal(loaded[2], other) for other in saved)


def test_a_full_drive_of_one_rank_is_an_error_of_all_and_costs_nothing(run: Run) -> None:
    for rank in found(run, "saves"):
        for said in (*rank["full"], rank["behind"]):
            assert said.startswith("StorageError: ")
            assert "cannot write a checkpoint" in said
            assert "No space left" in said
        left = [name for name in rank["left"] if not name.startswith(".writing-")]
        assert left == ["checkpoint-00000001"]
        assert rank["kept"] == [f"checkpoint-0000000{number}" for number in (1, 2, 3)]


def test_a_rank_that_is_killed_in_a_save_leaves_the_one_before(run: Run) -> None:
    folder, step = run
    (left,) = left_by(folder, 2, "dies", 0)
    assert left["said"].startswith("RankError: rank 1 is gone")
    assert step.load(folder / "dies") == {"number": 1}
    assert step.num_steps == 0
    assert [p.name for p in (folder / "dies").glob("[.c]*")] == ["checkpoint-00000001"]


def test_spoilt_files_are_refused_by_all_and_nothing_changes(run: Run) -> None:
    for rank in found(run, "saves"):
        assert [said.partition(":")[0] for said in rank["damaged"]] == ["CheckpointError"] * 5
        assert all("optimizer-0000" in said for said in rank["damaged"])
        assert rank["same"]


def test_folders_of_their_own_give_each_other_what_one_lacks(run: Run) -> None:
    for number, rank in enumerate(found(run, "saves")):
        own = f"-0000{number + 1}-of-00002.safetensors"
        parts = [name for name in rank["own"] if "-of-" in name]
        assert parts == [f"model{own}", f"optimizer{own}"]
        assert rank["extra"] == {"number": 10}
        assert torch.equal(rank["next"], rank["again"])
        # Checkpoints hold what rank 0 passes, as the others are told.
        assert rank["differing"] == {"rank": 0}
        who = "" if number else "RankMismatchError: rank 1 cannot do what all are about to: "
        assert rank["odd"].startswith(f"{who}ValueError: extra['x'] is a object")
        lost, names, gone = rank["partly"]
        assert not lost
        assert len(names) == 7
        assert not gone


def test_dcp_reads_any_of_them(run: Run, eager: Eager) -> None:
    folder, step = run
    for name in ("one", "single"):
        step.load(folder / name)
        wanted = step.state_dict()
        state = {f"model.{key}": torch.empty_like(v) for key, v in wanted["model"].items()}
        del state["model.again.weight"]  # tied: it is there once
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"optim.state.first.weight.{key}"] = torch.empty(1024, 48)
        state["optim.state.first.weight.step"] = torch.tensor(0.0)
        load(state, CheckpointReader(folder / name, model="model."))
        for key, value in wanted["model"].items():
            assert key == "again.weight" or torch.equal(state[f"model.{key}"], value)
        moments = wanted["optimizer"]["state"][0]
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(state[f"optim.state.first.weight.{key}"], moments[key])
    close(dict(wanted["model"]), eager[1].state_dict())


def test_a_lost_drive_s_files_come_from_their_replicas(run: Run) -> None:
    for rank in (each["replicas"] for each in found(run, "saves")):
        assert rank["refused"].startswith("UnsupportedOpError: replicas=2 keeps what a rank writes")
        assert [name for name in rank["kept"] if "-of-" in name] == [
            f"{kind}-0000{number}-of-00002.safetensors"
            for kind in ("model", "optimizer")
            for number in (1, 2)
        ]
        assert rank["again"] == rank["kept"]
        assert rank["extra"] == {"number": 11}
        assert rank["same"]
        predicted, written = rank["cost"]
        assert predicted == pytest.approx(written, rel=0.05)
        assert rank["seconds"] > 0


def load(state: dict[str, torch.Tensor], reader: CheckpointReader) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_load(state, storage_reader=reader)


def test_parts_become_plain_files(run: Run, eager: Eager, tmp_path: Path) -> None:
    folder, _ = run
    made = consolidate(folder / "one", tmp_path / "plain", file_bytes=300_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]
    files = sorted(made.glob("model-*-of-*.safetensors"))
    assert len(files) > 1
    state = {name: value for path in files for name, value in load_file(path).items()}
    state["again.weight"] = state["first.weight"]
    model = SCENARIO.model()
    model.load_state_dict(state)
    close(dict(model.state_dict()), dict(eager[1].state_dict()))


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            StorageError,
            r"plain: .*No space left on device$",
        ),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_what_interrupts_a_consolidation_is_told_as_such(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    kind: type[BaseException],
    said: str,
) -> None:
    def failing(*_: object) -> None:
        raise fault

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", failing)
    with pytest.raises(kind, match=said):
        consolidate(run[0] / "one", tmp_path / "plain")
    assert not list(tmp_path.iterdir())


def test_dcp_writes_them_and_leaves_older_ones_whole(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        for number in range(2):
            state = {"a": torch.full((3, 4), float(number)), "b": torch.tensor(number)}
            dcp_save(state, storage_writer=CheckpointWriter(tmp_path))
        with pytest.raises(CheckpointException, match="is no tensor") as refused:
            dcp_save({"a": 1}, storage_writer=CheckpointWriter(tmp_path))
    assert isinstance(refused.value.failures[0][0], UnsupportedOpError)
    read = {"a": torch.empty(3, 4), "b": torch.tensor(7)}
    load(read, CheckpointReader(tmp_path))
    assert torch.equal(read["a"], torch.ones(3, 4))
    assert read["b"] == 1
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000002"]


def test_a_checkpoint_is_no_pickle(run: Run, tmp_path: Path) -> None:
    folder, _ = run
    for path in folder.glob("one/*/*"):
        assert path.suffix in (".safetensors", ".json")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        CheckpointReader(tmp_path).read_metadata()


def test_a_model_that_one_rank_has_changed_ends_no_job(run: Run) -> None:
    own, other = (rank["changed"] for rank in reversed(found(run, "saves")))
    for refused, told in zip(own[:4], other[:4], strict=True):
        assert refused.startswith("UnsupportedOpError") and "other modules" in refused
        assert told.startswith("RankMismatchError: rank 1 cannot do what all are about to")
    assert own[4:] == other[4:] == ["", ""]
