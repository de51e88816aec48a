"""The staleness study's schedules, and one tiny study from the command line to table and plot."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from app.learner.buffer import Group
from app.learner.microbatch import Row, collate, completion_logprobs
from bench import staleness, staleness_lags
from bench.staleness_report import plot, table
from bench.staleness_variants import StudyTrainer
from tests.unit.learner.samples import batch, job, random_model


@pytest.mark.parametrize("budget", [1, 2, 3, 6, 11])
def test_lags_are_those_of_the_schedule(budget: int):
    const = [t - staleness_lags.behaviour_version("const", budget, t) for t in range(100)]
    assert const[budget:] == [budget] * (100 - budget)
    assert const[:budget] == list(range(budget))
    echo = [t - staleness_lags.behaviour_version("echo", budget, t) for t in range(2, 2 + 8 * max(1, budget - 1))]
    assert echo == [min(lag, budget) for lag in range(2, max(2, budget) + 1)] * 8


def test_an_adaptive_s_shortens_the_lag_after_a_bad_step():
    plan = staleness.Plan("dppo", "adaptive", 6, 0, 60, 1e-3, None, 8)
    timetable, lags = staleness_lags.Timetable(plan.schedule, plan.spec), []
    for t in range(60):
        lags.append(t - timetable.version(t))
        bad = lags[-1] > 3
        timetable.after({"ess": 0.3 if bad else 0.99, "mismatch_kl": 0.0, "reward": 0.5}, lags[-1])
        assert lags[-1] <= timetable.staleness[t] <= 6
    assert (max(lags[:10]), max(lags)) == (3, 4)
    # S begins at 3; from then on a longer lag is tried now and then, and given up at the first step.
    assert all(b <= 3 for a, b in itertools.pairwise(lags) if a > 3)
    assert timetable.staleness[5] == 3
    assert max(timetable.staleness[5:]) == 4


def test_forgetting_puts_the_learners_own_logprobs_in():
    model = random_model()
    before = batch(1)
    after = staleness.forgetful(model, before)
    assert [[r.completion_ids for r in g.rollouts] for g in after] == [
        [r.completion_ids for r in g.rollouts] for g in before
    ]
    one: Group = after[2]
    for r in one.rollouts:
        row = Row(r.prompt_ids, r.completion_ids, r.logprobs, 0.0, [0] * len(r.completion_ids))
        with torch.no_grad():
            own = completion_logprobs(model, collate([row], model.device), 1.0)
        assert list(r.logprobs) == pytest.approx(own.tolist(), abs=1e-5)


def made(loss: str, s: int, seed: int, heldout: float) -> dict:
    numbers = {"start": 0.2, "ess": 0.9, "log_ratio_squared": 0.1, "clip_share": 0.2, "train_reward": [0.5]}
    numbers["mean_staleness"] = 1.0
    return {"schedule": "echo", "loss": loss, "staleness": s, "seed": seed, "heldout": heldout} | numbers


def test_the_report_has_a_row_for_each_cell_with_the_mean_of_its_seeds(tmp_path):
    runs = [made("dppo", 6, 0, 0.5), made("dppo", 6, 1, 0.7), made("dppo", 1, 1, 0.8), made("uncorrected", 6, 0, 0.1)]
    rows = table(runs).splitlines()[2:]
    assert len(rows) == 3
    assert "| echo | dppo | 1 | 1 | 0.200 | 0.800 | 0.800–0.800 | – |" in rows[0]
    # Against S = 1 of the same seeds: of seed 0 there is none.
    assert "| echo | dppo | 6 | 2 | 0.200 | 0.600 | 0.500–0.700 | -12.5 % |" in rows[1]
    assert rows[2].endswith("| – | – | – |")
    plot(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_are_there_are_not_made_again(tmp_path, monkeypatch, capsys):
    asked = []

    def run(plan, folder, task):
        asked.append((plan.schedule, plan.loss, plan.staleness))
        found = made(plan.loss, plan.staleness, plan.seed, 0.5) | {"schedule": plan.schedule}
        return staleness.dataclasses.asdict(plan) | found

    monkeypatch.setattr(staleness, "run", run)
    monkeypatch.setattr(staleness, "tiny_model", lambda cache: cache)
    monkeypatch.setattr(staleness, "load_task", lambda spec, seed: None)
    options = ["--out", str(tmp_path), "--losses", "dppo,uncorrected", "--seeds", "0"]
    assert staleness.main([*options, "--staleness", "1,6"]) == 0
    assert staleness.main([*options, "--staleness", "1,6,11"]) == 0
    assert staleness.main([*options, "--staleness", "1,6,11,20", "--report-only"]) == 0
    fixed = [("echo", loss, s) for loss in ("dppo", "uncorrected") for s in (1, 6, 11)]
    assert sorted(asked) == sorted([*fixed, ("adaptive", "dppo", 11)]), "only what is corrected can steer S"
    assert "| dppo | 11 |" in (tmp_path / "table.md").read_text()
    with pytest.raises(SystemExit):
        staleness.main([*options, "--staleness", "20", "--adaptive", "20", "--report-only"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last["heldout"]) == {"/".join(map(str, cell)) for cell in asked}


def test_a_variant_is_another_run_than_what_was_made_without_it(tmp_path, monkeypatch):
    asked = []

    def run(plan, folder, task):
        asked.append(plan)
        return staleness.dataclasses.asdict(plan) | made(plan.loss, plan.staleness, plan.seed, 0.5)

    monkeypatch.setattr(staleness, "run", run)
    monkeypatch.setattr(staleness, "tiny_model", lambda cache: cache)
    monkeypatch.setattr(staleness, "load_task", lambda spec, seed: None)
    options = [
        "--out",
        str(tmp_path),
        "--losses",
        "ppo_clip",
        "--staleness",
        "11",
        "--adaptive",
        "none",
        "--seeds",
        "0",
    ]
    assert staleness.main(options) == 0
    log = tmp_path / "runs.jsonl"
    row = json.loads(log.read_text())
    for name in ("learner", "max_mismatch_kl", "first", "step_size", "beta1"):
        del row[name]  # as it was before there were variants
    log.write_text(json.dumps(row) + "\n")
    for variant in ([], ["--learner", "gac=true,gac_high=0.8"], ["--step-size", "ess"], ["--beta1", "0.5"]):
        assert staleness.main([*options, *variant]) == 0
        assert staleness.main([*options, *variant]) == 0
    gac = asked[1].spec.learner
    assert (gac.gac, gac.gac_low, gac.gac_high) == (True, 0.3, 0.8)
    assert [(p.step_size, p.beta1) for p in asked] == [("constant", 0.9)] * 2 + [("ess", 0.9), ("constant", 0.5)]


def test_an_adaptive_s_begins_and_is_bounded_as_asked():
    plan = staleness.Plan("dppo", "adaptive", 11, 0, 60, 1e-3, None, 8, max_mismatch_kl=0.05)
    assert plan.spec.staleness is not None
    assert plan.spec.staleness.max_mismatch_kl == 0.05
    timetable = staleness_lags.Timetable(plan.schedule, plan.spec, 20)
    lags = []
    for t in range(40):
        lags.append(t - timetable.version(t))
        timetable.after({"ess": 0.99, "mismatch_kl": 0.04, "reward": 0.5}, lags[-1])
    assert set(timetable.staleness) == {11}
    assert max(lags) == 11


def test_step_sizes_are_those_that_are_told():
    def rate(**variant):
        trainer = StudyTrainer(random_model(), job(learner={"warmup_steps": 0}), **variant)
        trainer.lag = 6
        return trainer.step(batch(0)).values

    plain = rate()
    assert plain["learning_rate"] == 1e-2
    assert plain["ess"] < 0.9
    assert rate(step_size="ess")["learning_rate"] == pytest.approx(1e-2 * plain["ess"])
    assert rate(step_size="lag")["learning_rate"] == pytest.approx(1e-2 / 1.5)
    first, second = (StudyTrainer(random_model(), job(), beta1=b) for b in (0.9, 0.0))
    for trainer in (first, second):
        trainer.step(batch(0))
        trainer.step(batch(1))
    assert not torch.equal(*(next(iter(t.weights().values())) for t in (first, second)))


@pytest.mark.parametrize(
    "wrong",
    [
        ["--losses", "ppo"], ["--staleness", "0"], ["--seeds", "-1"], ["--steps", "0"], ["--learner", "gac"],
        ["--beta1", "1"], ["--adaptive", "many"], ["--adaptive-start", "0"], ["--step-size", "half"],
    ],
)  # fmt: skip
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        staleness.main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_a_field_that_no_job_has_is_said(capsys):
    with pytest.raises(SystemExit):
        staleness.main(["--learner", "gak=true"])
    assert "gak" in capsys.readouterr().err
