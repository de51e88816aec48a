"""What proofs of hidden states say in an audit, and what they don't."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from app.learner.audit.decide import FEW, Look, judge
from app.learner.audit.look import token_versions
from app.learner.audit.proofs import Match, bits, match, of_version, steps
from app.learner.audit.scoring import score
from app.learner.audit.statistics import NOTHING
from app.learner.buffer import Group
from app.protocol.proofs import PRIME, TOKENS, Proof, before_head, pack, points, prove
from app.protocol.trajectory import Rollout
from tests.unit.learner.audit.samples import Shelf, audited, sampled, sharper, told
from tests.unit.learner.audit.test_auditor import Rig

MODEL = sharper()
WIDTH = 64


def of_states(hidden: torch.Tensor, count: int | None = None) -> Proof:
    """What an honest node makes of these hidden states [tokens, width]."""
    count = points(*hidden.shape) if count is None else count
    flat = hidden.to(torch.bfloat16).flatten()
    places = flat.abs().topk(count).indices
    return prove(len(hidden), places.numpy()[None], bits(flat[places])[None])[0]


def states(model, rollout: Rollout) -> torch.Tensor:
    """What each token of a rollout is drawn from under these weights."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad(), before_head(model) as seen:
        model(input_ids=ids)
    return seen[0][0, len(rollout.prompt_ids) - 1 : -1]


def with_proofs(group: Group, *models, run: int = TOKENS) -> Group:
    """The group with proofs as a node with these weights makes them: one model for each span of versions."""

    def made(rollout: Rollout) -> bytes:
        ends = [*rollout.span_starts[1:], len(rollout.completion_ids)]
        found = []
        for model, start, end in zip(itertools.cycle(models), rollout.span_starts, ends, strict=False):
            found += [of_states(part) for part in states(model, rollout)[start:end].split(run)]
        return pack(found)

    return told(group, proofs=made)


def groups(*names: str, model=MODEL, version: int = 0, size: int = 4) -> list[Group]:
    return sampled(model, names, torch.Generator().manual_seed(1), version=version, size=size)


def moved(model, share: float, seed: int = 0):
    """Other weights: each parameter off by a share of its spread."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            spread = parameter.std() if parameter.numel() > 1 else 1.0
            parameter.add_(share * spread * torch.randn(parameter.shape, generator=generator))
    return other


def rescored(group: Group, model) -> Group:
    """The group with the log-probs that its tokens have under these weights."""
    found = {
        r.sample_index: s.logprob.tolist()
        for r, s in zip(group.rollouts, score(model, group.rollouts, 1.0, 4096), strict=True)
    }
    return told(group, logprobs=lambda r: found[r.sample_index])


@pytest.mark.parametrize(("tokens", "looked"), [(32, 64), (9, 36), (1, 4)])
@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.0, 0.0), (0.003, 0.0, 0.05), (0.3, 0.6, 1.0)])
def test_rounding_is_no_miss_and_other_states_are(tokens: int, looked: int, noise: float, least: float, most: float):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    proof = of_states(hidden)
    found = match(proof, hidden * (1 + noise * torch.randn(hidden.shape, generator=generator)))
    assert found.points == looked
    if looked >= 36:
        assert least <= found.misses / found.points <= most


def test_states_of_the_other_sign_all_miss():
    hidden = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    assert match(of_states(hidden), -hidden) == Match(64, 64)


def test_a_proof_of_fewer_points_or_tokens_than_it_should_have_misses_all():
    hidden = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    assert match(of_states(hidden), hidden) == Match(64, 0)
    assert match(of_states(hidden, count=127), hidden) == Match(64, 64)
    assert match(of_states(hidden), hidden[:31]) == Match(64, 64)


def test_one_value_for_all_places_does_not_pass_for_a_proof():
    hidden = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    flat = hidden.to(torch.bfloat16).flatten()
    guesses = sorted({int(b) for b in bits(flat[flat.abs().topk(64).indices])})
    zeros = np.zeros(127, dtype=np.int64)
    best = min(match(Proof(32, PRIME, np.concatenate([[guess], zeros])), hidden).misses for guess in guesses)
    assert best > 0.6 * 64


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (1.0, 1.0, 0),
        (1.0, 1.0078125, 1),
        (1.9921875, 2.0, 1),
        (-1.0, -1.0078125, 1),
        (1.0, 2.0, 128),
        (1.0, -1.0, 65536),
    ],
)
def test_steps_between_numbers(one: float, other: float, apart: int):
    pair = torch.tensor([one, other]).to(torch.bfloat16)
    assert steps(bits(pair[:1]), bits(pair[1:])).tolist() == [apart]


def test_an_honest_group_passes_and_says_how_much_was_looked_at():
    (group,) = groups("a")
    audit = audited(with_proofs(group, MODEL), Shelf({0: MODEL}))
    assert (audit.verdict, audit.fault, audit.proof_misses) == ("passed", "", 0)
    assert audit.proof_points >= 4 * len(group.rollouts)
    assert audited(group, Shelf({0: MODEL})).proof_points == 0


def test_true_log_probs_with_the_states_of_other_weights_are_seen():
    """A node that samples with old weights and has somebody tell it the log-probs of the right ones."""
    old = moved(MODEL, 0.3)
    (group,) = groups("a", model=old)
    told_right = rescored(group, MODEL)
    assert audited(told_right, Shelf({0: MODEL})).verdict == "passed", "the log-probs alone say nothing"
    audit = audited(with_proofs(told_right, old), Shelf({0: MODEL}))
    assert (audit.verdict, audit.fault) == ("failed", "proof")
    assert "hidden states" in audit.detail


def test_whoever_runs_the_right_weights_over_the_text_has_both():
    """What a proof is not: it does not say that the tokens were drawn from these weights."""
    (group,) = groups("a", model=moved(MODEL, 0.3))
    audit = audited(with_proofs(rescored(group, MODEL), MODEL), Shelf({0: MODEL}))
    assert (audit.verdict, audit.proof_misses) == ("passed", 0)


def test_where_the_policy_is_sure_of_each_token_only_states_tell_weights_apart():
    sure = copy.deepcopy(MODEL)
    with torch.no_grad():
        sure.model.embed_tokens.weight.mul_(6)
    shelf = Shelf({0: moved(sure, 0.3)})
    made = groups(*"abcdefgh", model=sure, size=2)
    quiet = [group for group in made if audited(group, shelf).verdict == "passed"]
    assert len(quiet) > len(made) / 2, "their log-probs are next to 0 under both"
    found = [audited(with_proofs(group, sure), shelf) for group in quiet]
    assert max(audit.rms for audit in found) < 0.01
    assert sum(audit.fault == "proof" for audit in found) > len(found) / 2


def test_each_proof_is_held_against_the_version_of_its_tokens():
    old, new = moved(MODEL, 0.5, seed=1), MODEL
    (plain,) = groups("a")
    spans = told(plain, span_versions=[3, 5], span_starts=[0, 1])
    spans = dataclasses.replace(spans, rollouts=tuple(r for r in spans.rollouts if len(r.completion_ids) > 3))
    assert spans.rollouts, "the case needs answers of two versions"
    good = with_proofs(spans, old, new)
    shelf = Shelf({3: old, 5: new})
    found = [score(shelf.models[v], good.rollouts, 1.0, 4096) for v in (3, 5)]
    for i, rollout in enumerate(good.rollouts):
        first, second = found[0][i].proofs, found[1][i].proofs
        assert [m.misses for m in of_version(first, rollout, token_versions(rollout), 3)] == [0]
        assert [m.misses for m in of_version(second, rollout, token_versions(rollout), 5)] == [0]
        assert list(of_version(first, rollout, token_versions(rollout), 4)) == []
    audit = audited(told(good, logprobs=lambda r: [-1.0] * len(r.completion_ids)), shelf, bound=10)
    assert audit.proof_misses == 0
    assert audit.proof_points == sum(m.points for s in found[0] for m in s.proofs)
    swapped = audited(with_proofs(spans, new, old), shelf, bound=10)
    assert swapped.fault == "proof"


def test_what_an_environment_wrote_is_not_looked_at():
    (plain,) = groups("a")
    marks = {r.sample_index: [i != 1 for i in range(len(r.completion_ids))] for r in plain.rollouts}
    marked = told(plain, generated=lambda r: marks[r.sample_index])

    def own(rollout: Rollout) -> bytes:
        kept = states(MODEL, rollout)[torch.tensor(rollout.written)]
        return pack([of_states(kept)])

    found = score(MODEL, told(marked, proofs=own).rollouts, 1.0, 4096)
    assert [m.misses for s in found for m in s.proofs] == [0] * len(plain.rollouts)


FINE = Look(dataclasses.replace(NOTHING, tokens=50), 0.0, 0, None)


@pytest.mark.parametrize(
    ("proofs", "changes", "verdict", "fault"),
    [
        ([Match(64, 0)] * 4, {}, "passed", ""),
        ([Match(64, 12)] * 4, {}, "passed", ""),
        ([Match(64, 14)] * 4, {}, "suspect", "proof"),
        ([Match(64, 32)] * 4, {}, "suspect", "proof"),
        ([Match(64, 33)] * 4, {}, "failed", "proof"),
        ([Match(64, 64), *[Match(64, 0)] * 3], {}, "suspect", "proof"),
        ([*[Match(64, 64)] * 2, *[Match(64, 0)] * 2], {}, "suspect", "proof"),
        ([*[Match(64, 64)] * 3, *[Match(64, 0)] * 2], {}, "failed", "proof"),
        ([Match(64, 64), *[Match(4, 0)] * 9], {}, "failed", "proof"),
        ([Match(64, 64), *[Match(64, 0)] * 9], {}, "passed", ""),
        ([Match(FEW - 1, FEW - 1)], {}, "passed", ""),
        ([Match(64, 64)], {"foreign": True}, "unclear", "proof"),
        ([Match(64, 64)], {"missing": 3}, "unclear", ""),
        ([Match(64, 64)], {"reward_off": 1.0}, "failed", "reward"),
    ],
)
def test_judge(proofs: list[Match], changes, verdict: str, fault: str):
    said = judge(dataclasses.replace(FINE, proofs=tuple(proofs), **changes), 0.03, 0.2)
    assert said[:2] == (verdict, fault)
    assert bool(said[2]) == (verdict != "passed")


def test_a_node_whose_proofs_are_of_other_weights_is_convicted_before_it_is_trained_on():
    rig = Rig(probation=2)
    rig.auditor.start()
    honest, liar = groups("a")[0], groups("b")[0]
    rig.receive(with_proofs(honest, Shelf({0: MODEL}).models[0]), node="honest")
    rig.receive(with_proofs(liar, moved(MODEL, 0.3)), node="liar")
    rig.settled()
    rig.auditor.stop()
    assert rig.here == ["a"]
    assert sorted(rig.told) == [("a", "passed"), ("b", "failed")]
    assert rig.court.convicted == {"liar"}


def test_proofs_take_no_second_pass():
    calls = []
    handle = MODEL.register_forward_hook(lambda *_: calls.append(1))
    (group,) = groups("a")
    calls.clear()
    score(MODEL, with_proofs(group, sharper()).rollouts, 1.0, 4096)
    handle.remove()
    assert len(calls) == 1


def test_a_node_that_computes_in_bfloat16_is_far_from_the_bound():
    rounding = copy.deepcopy(MODEL).to(torch.bfloat16)
    found = [audited(with_proofs(group, rounding), Shelf({0: MODEL})) for group in groups(*"abcdefgh")]
    misses, looked = sum(audit.proof_misses for audit in found), sum(audit.proof_points for audit in found)
    assert looked > 200
    assert misses <= 0.02 * looked
