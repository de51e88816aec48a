"""Our proofs of hidden states are those of the package `toploc` 0.1.6: each side reads and confirms the other's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import toploc
import torch

from app.learner.audit.proofs import match
from app.protocol.errors import Refused
from app.protocol.proofs import LEAST_MODULUS, POINTS, TOKENS, WORD, pack, parse
from app.rollout_agent.proofs import Prover
from tests.extras.packed import ours, theirs

WIDTHS = (64, 576, 2048, 5120)


def states(width: int, tokens: int, seed: int = 0) -> Any:
    """Hidden states [tokens, width] in bfloat16, no two of one size: which of equal ones is taken is anybody's word."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randperm(60_000 - 16_000, generator=generator)
    size = bits[torch.arange(tokens * width) % len(bits)] + 8_000
    largest = torch.randperm(tokens * width, generator=generator)[: 4 * POINTS]
    size = size % 16_000
    size[largest] = 16_000 + torch.randperm(4 * POINTS, generator=generator)
    sign = torch.randint(0, 2, size.shape, generator=generator) << 15
    raw = (size + sign).to(torch.int32).to(torch.uint16)
    return raw.view(torch.bfloat16).reshape(tokens, width)


def proven(hidden: Any) -> bytes:
    """As the agent proves one sample, whose tokens are drawn one by one."""
    seen: list[Any] = [None]
    prover = Prover(seen, 1)
    for row in hidden:
        seen[0] = row.reshape(1, 1, -1)
        prover.drawn(torch.tensor([0]), torch.tensor([True]), None)
    return prover.proofs()[0]


def built(hidden: Any) -> list[bytes]:
    """As the package proves them."""
    return list(toploc.build_proofs_bytes(list(hidden), decode_batching_size=TOKENS, topk=POINTS, skip_prefill=True))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(3))
def test_both_make_the_same_bytes(width: int, seed: int):
    hidden = states(width, 3 * TOKENS, seed)
    mine = parse(proven(hidden))
    assert [theirs(proof) for proof in mine] == built(hidden)
    assert [proof.tokens for proof in mine] == [TOKENS] * 3


def test_a_modulus_below_the_largest_is_found_by_both():
    moduli = set()
    for seed in range(16):
        hidden = states(5120, TOKENS, seed)
        mine = parse(proven(hidden))
        moduli |= {proof.modulus for proof in mine}
        assert [theirs(proof) for proof in mine] == built(hidden)
    assert len(moduli) > 1, "the case needs places that are one modulo 65497"


@pytest.mark.parametrize("width", WIDTHS)
def test_each_confirms_the_others_proofs(width: int):
    hidden, other = states(width, 2 * TOKENS), states(width, 2 * TOKENS, seed=99)
    mine, package = [theirs(proof) for proof in parse(proven(hidden))], built(hidden)
    for proofs in (mine, package):
        right = toploc.verify_proofs_bytes(hidden, proofs, decode_batching_size=TOKENS, topk=POINTS, skip_prefill=True)
        assert [(r.exp_mismatches, r.mant_err_mean) for r in right] == [(0, 0.0)] * 2
        wrong = toploc.verify_proofs_bytes(other, proofs, decode_batching_size=TOKENS, topk=POINTS, skip_prefill=True)
        assert all(r.exp_mismatches > 0 or r.mant_err_mean > 1 for r in wrong)
        for number, proof in enumerate(parse(b"".join(map(ours, proofs)))):
            run = slice(number * TOKENS, (number + 1) * TOKENS)
            assert match(proof, hidden[run]).misses == 0
            assert match(proof, other[run]).misses > POINTS // 4


def test_what_the_package_gives_in_the_place_of_a_proof_it_could_not_make_is_refused():
    nothing = toploc.ProofPoly.null(POINTS).to_bytes()
    with pytest.raises(Refused, match=f"a modulus above {LEAST_MODULUS}"):
        parse(ours(nothing))


def test_proofs_travel_through_their_format_and_back():
    words = proven(states(576, 2 * TOKENS))
    assert pack(parse(b"".join(ours(theirs(proof)) for proof in parse(words)))) == words
    assert len(words) == 2 * (3 + POINTS) * WORD.itemsize


@pytest.mark.parametrize("proof", ["toploc.ProofPoly([1], 0)", "toploc.ProofPoly([], 65497)"])
def test_its_verifier_does_not_survive_what_ours_refuses(proof: str):
    """Why proofs of strangers are never given to it."""
    code = (
        f"import torch, toploc; toploc.verify_proofs(torch.ones(32, 8, dtype=torch.bfloat16), [{proof}], 32, 1, True)"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=100, capture_output=True)
    assert ended.returncode < 0
