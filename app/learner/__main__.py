"""`python -m app.learner --job ID`; on several GPUs `torchrun --nproc-per-node N -m app.learner --job ID`."""

from __future__ import annotations

import argparse
import os

from app.learner.process import main


def parse() -> argparse.Namespace:
    """The arguments; each has a setting that it stands above."""
    parser = argparse.ArgumentParser(prog="python -m app.learner", description="Train one job.")
    parser.add_argument("--job", help="job id; default ECHO2_JOB_ID")
    parser.add_argument("--url", help="the control service; default ECHO2_CONTROL_URL")
    parser.add_argument("--token", help="learner token; default ECHO2_LEARNER_TOKEN, which other users can't see in ps")
    parser.add_argument("--state-dir", help="checkpoints, snapshots, cache; default ECHO2_STATE_DIR, else .echo2")
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    folder = None if given.state_dir is None else os.path.abspath(given.state_dir)
    raise SystemExit(main(given.job, control_url=given.url, learner_token=given.token, state_dir=folder))
