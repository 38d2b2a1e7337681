"""TensorBoard's own reader finds what was logged, once for each step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.observe.sinks.tensorboard import TensorBoard
from tests.observe.sinks.support import HOSTILE, LAGS, play, source

pytestmark = pytest.mark.slow
pytest.importorskip("tensorboard")


def test_curves_histograms_and_texts_are_read_back_and_steps_that_are_trained_again_replace_the_old(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(lambda: TensorBoard(source(tmp_path)), tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard" / "learner"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(0, 1.0), (1, 0.0), (2, 8.0), (3, 7.0)]
    texts = {tag: found.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    assert texts["configuration/text_summary"].startswith("    learner:\n      steps: 4")
    for table in ("episodes", "held_out_episodes"):
        assert texts[f"{table}/0/text_summary"].splitlines()[-1] == f"    assistant: {HOSTILE}"


def test_histograms_have_the_bins_that_were_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(source(tmp_path))
    sink.histograms(2, {"lag": LAGS})
    sink.close()
    found = EventAccumulator(str(tmp_path / "tensorboard" / "learner"))
    found.Reload()
    [event] = found.Histograms("histogram/lag")
    value = event.histogram_value
    assert (event.step, list(value.bucket_limit), list(value.bucket)) == (2, [-0.5, 0.5, 1.5], [0.0, 3.0, 1.0])
    assert (value.num, value.sum, value.sum_squares) == (4, 1, 1)


def test_it_is_written_without_torch_which_not_every_role_has_loaded(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from asyncrl.observe.sinks.tensorboard import TensorBoard;"
        "from tests.observe.sinks.support import source;"
        "sink = TensorBoard(source(Path(sys.argv[1]))); sink.log(0, {'loss': 0.5}); sink.close();"
        "assert not {'torch', 'tensorflow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert list((tmp_path / "tensorboard" / "learner").iterdir())
