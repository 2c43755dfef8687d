"""The training examples run from their command lines: they learn, keep their budget, stop and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import train_text, train_vision
from examples.small_gpt import SmallGPT, batch_at, next_byte_loss, read_text

pytestmark = pytest.mark.usefixtures("_quick_plans")

SIZES = ["--layers", "2", "--width", "64", "--heads", "2", "--tokens", "32", "--batch", "2"]
# Weights, gradients and moments alone take 2.1 MB, beside the transfer buffers of 4 MiB.
BUDGET = ["--budget", "5.5MiB"]


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    return data


def test_text_is_learned_as_eager_learns_it_and_a_resumed_run_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "loss.png"
    common = [*BUDGET, "--every", "10", "--json"]
    command = [*SIZES, *common, "--steps", "20", "--compare", "--plot", str(picture)]
    assert train_text.main(command) == 0
    whole = _json(capsys)
    assert whole["failures"] == []
    assert whole["max_difference"] <= 1e-4
    assert whole["peak_bytes"] <= whole["budget_bytes"] == 11 << 19
    assert sum(whole["link_bytes"].values()) > 0
    assert len(whole["losses"]) == 20
    # A byte chosen blindly costs log 256 = 5.55 nats.
    assert whole["held_out"]["0"] == pytest.approx(5.55, abs=0.1)
    assert whole["held_out"]["20"] < whole["held_out"]["10"] < whole["held_out"]["0"] - 0.3
    assert picture.read_bytes().startswith(b"\x89PNG")

    saved = str(tmp_path / "run")
    assert train_text.main([*SIZES, *common, "--steps", "10", "--save", saved]) == 0
    assert _json(capsys)["losses"] == whole["losses"][:10]
    with pytest.raises(SystemExit):
        train_text.main([*SIZES, *common, "--steps", "10", "--save", saved])
    assert "has a run" in capsys.readouterr().err
    # The sizes of the model are the saved run's.
    assert train_text.main([*common, "--steps", "20", "--resume", saved]) == 0
    resumed = _json(capsys)
    assert (resumed["first_step"], resumed["num_steps"]) == (10, 10)
    assert resumed["losses"] == whole["losses"]
    assert resumed["held_out"]["20"] == whole["held_out"]["20"]


def test_text_training_prints_a_table_and_a_step_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawn = tmp_path / "drawn"
    assert train_text.main([*SIZES, *BUDGET, "--steps", "2", "--timeline", str(drawn)]) == 0
    shown = capsys.readouterr()
    for part in ("weights", "of 5.50 MiB", "held-out text", "per step"):
        assert part in shown.out
    assert "step 2  loss" in shown.err
    assert "nvme->cpu" in shown.err
    events = json.loads((drawn / "timeline.perfetto.json").read_text())["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["predicted", "measured"]
    assert (drawn / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_text_training_says_what_budget_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_text.main([*SIZES, "--budget", "1MiB"]) == 1
    assert "smallest feasible budget" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "no-such-folder"], "no-such-folder"),
        (["--text", "no-such-text"], "no-such-text"),
        (["--width", "10", "--heads", "3"], "no multiple"),
        (["--tokens", "99999999"], "too short"),
        (["--budget", "much"], "much"),
        (["--steps", "0"], "1 or more"),
        (["--resume", "x", "--compare"], "--resume"),
    ],
)
def test_text_training_refuses_what_cannot_work(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_text.main(arguments)
    assert message in capsys.readouterr().err


def test_a_wrong_text_run_fails() -> None:
    good = {"peak_bytes": 5, "budget_bytes": 5, "max_difference": 1e-5}
    assert train_text.failures(good) == []
    assert len(train_text.failures({**good, "peak_bytes": 6})) == 1
    assert len(train_text.failures({**good, "max_difference": float("nan")})) == 1


def test_small_gpt_looks_at_earlier_bytes_only() -> None:
    model = SmallGPT(layers=2, width=32, heads=4, tokens=16)
    ids = torch.randint(0, 256, (2, 16))
    changed = ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert (before[:, 10:] != after[:, 10:]).any()
    with pytest.raises(ValueError, match="3 heads"):
        SmallGPT(layers=1, width=32, heads=3, tokens=16)


def test_batches_are_pieces_of_the_text() -> None:
    text = read_text(None)
    assert b"assert" in text and len(text) > 100_000
    ids, following = batch_at(text, 3, batch=4, tokens=16)
    assert ids.shape == following.shape == (4, 16)
    torch.testing.assert_close(ids[:, 1:], following[:, :-1])
    assert all(bytes(row.tolist()) in text for row in ids)
    torch.testing.assert_close(batch_at(text, 3, batch=4, tokens=16)[0], ids)
    assert (batch_at(text, 4, batch=4, tokens=16)[0] != ids).any()
    with pytest.raises(ValueError, match="16 bytes is too short"):
        batch_at(b"x" * 16, 0, batch=1, tokens=16)


def test_the_loss_of_next_bytes_by_hand() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            # Each byte expects itself again, e times as likely as any other.
            return torch.nn.functional.one_hot(ids, 256).float()

    ids = torch.tensor([[1, 2]])
    right = next_byte_loss(Fixed(), (ids, ids))
    assert float(right) == pytest.approx(float(torch.log(torch.tensor(255 + torch.e))) - 1)


def test_digits_are_learned_inside_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    command = ["--epochs", "1", "--width", "8", "--batch", "30", "--lr", "0.005", *BUDGET, "--json"]
    assert train_vision.main(command) == 0
    data = _json(capsys)
    assert data["failures"] == []
    assert data["accuracies"][-1] > 0.7
    assert len(data["losses"]) == 1
    assert data["peak_bytes"] <= data["budget_bytes"]


def test_vision_refuses_what_cannot_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["--budget", "much"], ["--epochs", "0"]):
        with pytest.raises(SystemExit, match="2"):
            train_vision.main(arguments)
    assert train_vision.failures(
        {"peak_bytes": 6, "budget_bytes": 5, "accuracies": [0.9, 0.1]}
    ) == [
        "the peak of 6 bytes is above the budget of 5",
        "an accuracy of 10.0% is little more than guessing",
    ]
    monkeypatch.setattr(train_vision, "find_spec", lambda name: None)
    capsys.readouterr()
    assert train_vision.main([]) == 1
    assert "pip install scikit-learn" in capsys.readouterr().err
