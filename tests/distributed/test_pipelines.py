"""Stages of a pipeline that train a model together, against one process; what they refuse, and how they end."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import _pytree as pytree

from gascompile.machines.resolve import preset
from gascompile.passes.parallel.legs import Action
from gascompile.training.pipeline.schedule import orders
from gascompile.training.pipeline.stage_problem import cuts
from tests.distributed import pipeline_worker
from tests.distributed.jobs import FilledOnce
from tests.distributed.pipeline_jobs import PIPED, TIGHT_BYTES, batches, loss_fn, train_eagerly
from tests.distributed.test_ranks import close, left_by, run_forked_job, run_job
from tests.training.trials import MACHINE, TRANSFER_BYTES

_WORKER = "tests.distributed.pipeline_worker"
LOADS = {"gpt": ("loads", "loads from one"), "llama": ("loads in parallel",)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two stages left; the last one ends itself in the end."""
    folder = tmp_path_factory.mktemp("two")
    asked = [
        *(f"trains:{n}" for n in PIPED),
        "resumes",
        "files:llama",
        "nan",
        "refuses",
        "mixes",
        "infers",
        "differs",
    ]
    codes = run_job(folder, 2, *asked, "killed", worker=_WORKER)
    assert codes == [0, -signal.SIGALRM], [
        (folder / f"log-{r}").read_text()[-3000:] for r in (0, 1)
    ]
    return folder


@pytest.fixture(scope="module")
def three(two: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """What three ranks left that went on from checkpoints of two stages and of one process; and that process."""
    alone = {name: pipeline_worker.loads(PIPED[name], two / name) for name in LOADS}
    asked = [f"{kind}:{name}" for name, kinds in LOADS.items() for kind in kinds]
    codes = run_forked_job(two, 3, *asked, "killed in a call", worker=_WORKER)
    assert codes == [0, -signal.SIGKILL, 0], (two / "log-0").read_text()[-3000:]
    return two, alone


def _require_trained(found: list[dict[str, Any]], name: str) -> None:
    losses, model, optimizer = train_eagerly(PIPED[name])
    for rank in found:
        for own, whole in zip(rank["losses"], losses, strict=True):
            torch.testing.assert_close(own, whole, rtol=1e-6, atol=0)
        close(rank["state"]["model"], model.state_dict())
        close(rank["state"]["optimizer"]["state"], optimizer.state_dict()["state"])
    first, *others = (rank["state"] for rank in found)
    for other in others:
        pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(other), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


@pytest.mark.parametrize("name", PIPED)
def test_equal_to_one_process(two: Path, name: str) -> None:
    found = left_by(two, 2, f"trains:{name}")
    _require_trained(found, name)
    _, model, _ = train_eagerly(PIPED[name])
    every = {n: p.detach() for n, p in model.named_parameters()}
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    for rank in found:
        # What a rank has in the end is what it had in between: its stage's, and what nobody changes.
        assert rank["own"].keys() == frozen | {n for n in rank["held"] if n in every}
        close(rank["own"], {n: every[n] for n in rank["own"]})
        assert name != "gpt" or rank["peak"] <= TIGHT_BYTES - TRANSFER_BYTES
    # Who updates nothing has its part in the norm that all clip by.
    assert name != "loss alone" or found[1]["own"].keys() == frozen
    # Both keep what leaves memory on one drive.
    drive = preset(MACHINE).link("nvme->cpu")
    assert {rank["drive"] for rank in found} == {drive.bandwidth_bytes_per_s / 2}
    # The larger stage has less memory than it has values.
    assert name != "gpt" or [rank["moved"] > 0 for rank in found] == [False, True]
    both = found[0]["own"].keys() & found[1]["own"].keys()
    assert found[0]["own"].keys() | found[1]["own"].keys() == every.keys()
    assert both == ({"embedding.weight"} if name == "gpt" else frozen)


def test_a_state_is_one_processes_too(two: Path) -> None:
    again = left_by(two, 2, "resumes")
    alone = pipeline_worker.resumes(PIPED["gpt"], two / "gpt")
    for rank, before in zip(again, left_by(two, 2, "trains:gpt"), strict=True):
        close(rank["losses"], alone["losses"])
        assert (before["num_planned"], rank["num_planned"]) == (1, 0)


@pytest.fixture(scope="module")
def four(filled_once: FilledOnce) -> Path:
    """What two pipelines of two stages left; a rank ends itself in the end."""
    asked = [*(f"beside:{n}" for n in PIPED), "killed beside"]

    def fill(folder: Path) -> None:
        codes = run_forked_job(folder, 4, *asked, worker=_WORKER)
        said = [(folder / f"log-{rank}").read_text()[-2000:] for rank in range(4)]
        assert codes == [0, 0, -signal.SIGKILL, 0], said

    return filled_once("pipelines", fill)


@pytest.mark.parametrize("name", PIPED)
def test_pipelines_beside_each_other_are_one_process(four: Path, name: str) -> None:
    found = left_by(four, 4, f"beside:{name}")
    _require_trained(found, name)
    for stage in (0, 1):
        one, other = found[stage]["own"], found[stage + 2]["own"]
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    for rank in found:
        assert "RankMismatchError: rank 1 and rank 0 differ in the batch" in rank["said"]
        assert "targets that the loss ignores, or other ranks" in rank["ignored"]


def test_who_is_killed_beside_is_named(four: Path) -> None:
    for rank in left_by(four, 4, "killed beside", 0, 1, 3):
        assert rank["rank"] == 2
        assert "rank 2 is gone" in rank["said"]


@pytest.mark.parametrize("name", LOADS)
def test_a_checkpoint_is_any_number_s_of_stages_or_ranks(
    three: tuple[Path, dict[str, dict[str, Any]]], name: str
) -> None:
    folder, alone = three
    saved = left_by(folder, 2, f"trains:{name}")[0]["state"]
    again = pipeline_worker.resumes(PIPED[name], folder / name)
    for found in (
        alone[name],
        *(r for kind in LOADS[name] for r in left_by(folder, 3, f"{kind}:{name}")),
    ):
        pairs = zip(pytree.tree_leaves(saved), pytree.tree_leaves(found["state"]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
        close(found["losses"], again["losses"])
    files = [load_file(path) for path in (folder / name / "saved").glob("*/*.safetensors")]
    names = [key for file in files for key in file if "random" not in key]
    assert len(names) == len(set(names))


def test_who_is_killed_in_a_call_is_named(three: tuple[Path, Any]) -> None:
    for rank in left_by(three[0], 3, "killed in a call", 0, 2):
        assert rank["rank"] == 1
        assert "rank 1 is gone" in rank["said"]


def test_a_model_that_no_rank_has_whole(two: Path) -> None:
    losses, _, _ = train_eagerly(PIPED["llama"])
    for rank in left_by(two, 2, "files:llama"):
        close(rank["losses"], losses[:-1])
        assert "OpenStepError" in rank["said"]


def test_a_nan_changes_nothing(two: Path) -> None:
    found = left_by(two, 2, "nan")
    for rank in found:
        assert "NanLossError" in rank["said"]
        pairs = zip(rank["before"].values(), rank["after"].values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert found[0]["loss"] == found[1]["loss"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("ignored", "UnsupportedOpError: micro-batches have [3, 0, 0, 0] targets that the loss ignores"),
        ("other batch", "RankMismatchError: rank 1 and rank 0 differ in"),
        ("call", "UnsupportedOpError: parameters are divided among the ranks"),
        ("dropout", "draws random numbers"),
        ("batch norm", "UnsupportedOpError: the model changes its buffer '1.num_batches_tracked'"),
        ("accumulate", "UnsupportedOpError: accumulate=2"),
        ("8 bits", "UnsupportedOpError: states='8bit'"),
        ("mesh", "ValueError: the mesh has 2 dimensions ('dp', 'pp')"),
    ],
)  # fmt: skip
def test_what_would_be_another_result_is_refused(two: Path, what: str, said: str) -> None:
    for rank in left_by(two, 2, "refuses"):
        assert said in rank[what]


@pytest.mark.parametrize(
    ("what", "first", "other"),
    [
        ("options", "RankMismatchError: rank 1 and rank 0 differ in the options", "RankMismatchError: rank 1 and"),
        ("budget", "RankMismatchError: rank 1 cannot do what all are about to: Infeasible", "InfeasiblePlanError"),
        ("files", "RankMismatchError: rank 1 and rank 0 differ in the content", "RankMismatchError: rank 1 and"),
        ("stage", "RankError: rank 1 has failed: StorageError: this stage's", "StorageError: this stage's"),
    ],
)  # fmt: skip
def test_what_one_rank_differs_in_is_told_to_all(
    two: Path, what: str, first: str, other: str
) -> None:
    said = [rank[what] for rank in left_by(two, 2, "differs")]
    assert said[0].startswith(first)
    assert said[1].startswith(other)


def test_a_step_goes_on_after_a_refusal(two: Path) -> None:
    first, second = left_by(two, 2, "refuses")
    model, optimizer = PIPED["gpt"].model, PIPED["gpt"].optimizer
    torch.manual_seed(0)
    plain = model()
    own = optimizer(plain)
    for _ in range(2):
        own.zero_grad()
        loss = loss_fn(plain, batches()[0])
        loss.backward()
        own.step()
    torch.testing.assert_close(first["loss"], loss.detach(), rtol=1e-6, atol=0)
    assert first["loss"] == second["loss"]


def test_rows_that_know_of_each_other_stay_together(two: Path) -> None:
    for rank in left_by(two, 2, "mixes"):
        torch.testing.assert_close(rank["loss"], rank["expected"], rtol=1e-6, atol=0)
        assert "2 stages of 1 micro-batch are predicted to take" in rank["said"]
        assert "one micro-batch: rows may know of each other" in rank["said"]


def test_a_model_is_called_whose_stages_are_on_all_ranks(two: Path) -> None:
    first, second = left_by(two, 2, "infers")
    for rank in (first, second):
        assert rank["equal"] == [True] * 3
        assert rank["from files"]
        assert rank["peak"] <= 128 << 10
        assert "RankMismatchError" in rank["other inputs"]
        assert "RankMismatchError" in rank["other weights"]
        assert "UnsupportedOpError" in rank["save"]
        assert any("2 stages of 1 micro-batch are predicted" in said for said in rank["said"])
    assert {*first["weights"]} & {*second["weights"]} == {"embedding.weight", "mask"}


def test_who_is_killed_is_named(two: Path) -> None:
    (told,) = left_by(two, 2, "killed", 0)
    assert told["rank"] == 1
    assert "rank 1 is gone" in told["said"]


def test_stages_may_begin_all_over_the_ops_where_little_is_sent() -> None:
    assert cuts([0, 4, 9, 4]) == [False, True, True, True]
    # Behind the loss, the last, next to nothing is sent.
    found = cuts([0, *[9, 9, 5, 9] * 24, 1])
    places = [place for place, is_one in enumerate(found) if is_one]
    assert len(places) == 33
    assert max(b - a for a, b in itertools.pairwise(places)) <= 5
    assert {place for place in places if place % 4 == 3} == {*range(3, 97, 4)}


@pytest.mark.parametrize(("num_stages", "num_batches"), [(1, 3), (2, 1), (2, 4), (3, 4), (4, 9)])
def test_schedules_run_all_legs_in_an_order_that_can_be(num_stages: int, num_batches: int) -> None:
    table = [list(row) for row in orders(num_stages, num_batches, has_backward=True)]
    done: set[Action] = set()
    total = sum(map(len, table))
    while len(done) < total:
        before = len(done)
        for row in table:
            while row and (
                not row[0].leg or Action(leg=row[0].leg - 1, batch=row[0].batch) in done
            ):
                done.add(row.pop(0))
        assert len(done) > before, "each waits for another"
    assert total == 2 * num_stages * num_batches == len(done)
