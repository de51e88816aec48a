"""`python -m app.learner --job ID`."""

from __future__ import annotations

import argparse

from app.learner.process import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m app.learner", description="Train one job.")
    parser.add_argument("--job", help="job id; default ECHO2_JOB_ID")
    raise SystemExit(main(parser.parse_args().job))
