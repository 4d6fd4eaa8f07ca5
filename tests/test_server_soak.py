"""Two minutes of random traffic against a server process: nothing is left behind. benchmarks/soak.py does it longer.

The workers mostly wait, so that the suite's other work is not held up.
"""

import pytest

pytest.importorskip("fastapi")
from llmopt.benchmarks.serve_process import ServerProcess, tiny_model
from llmopt.benchmarks.soak import MOST_BYTES, OPTIONS, Soak, growth, is_flat, soak

MIB = 2**20


def test_soak(tmp_path):
    with ServerProcess(tiny_model(tmp_path), *OPTIONS) as server:
        report = soak(server, minutes=2, workers=6, seed=1, pause=2.0)
        log = server.log_text()
    shown = {key: value for key, value in report.items() if key != "rss_samples"}
    assert report["broken"] == [], (shown, log[-3000:])
    played = {outcome.split()[0] for outcome in report["outcomes"]}
    assert {"whole", "stream", "leave", "malformed", "slow", "deadline"} <= played
    assert report["sequences"] > 50
    assert "Traceback" not in log


def test_the_checks_can_fail(tmp_path):
    samples = [(float(second), 500 * MIB + second * MIB) for second in range(120)]  # a leak of a MiB a second
    assert not is_flat(*growth(samples))
    assert is_flat(*growth([(when, 500 * MIB + MOST_BYTES * (when > 60)) for when, _ in samples]))
    run = Soak(None, seed=0)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="status 500"):
        run._expect(500, b"{}", 200, 429)
