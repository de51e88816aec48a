"""The tiny model: made once, under-trained on purpose, and opened by the library's own loader."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from app.fleet.jobs import BUILT_IN
from app.learner.evaluate import Evaluator
from app.learner.model import LoadedModel, assets, check_lengths, load, resolve, unique_weights
from app.learner.sampling import eos_ids, sample
from app.learner.tiny import RECIPES, Recipe, build_tokenizer, tiny_model
from app.learner.trainer import GRPOTrainer, TrainerState
from app.protocol.errors import BadInput, LearnerError
from app.tasks.prompts import decode, encode_prompt
from app.tasks.registry import load_task
from tests.unit.learner.samples import job

CACHE = Path(__file__).parents[3] / ".echo2" / "test-cache"
SPELL = {"name": "reasoning_gym", "params": {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5}}
SPEC = job(task=SPELL, sampling={"max_tokens": 8})


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    return load(tiny_model(CACHE))


@pytest.fixture(scope="session")
def task():
    return load_task(SPEC.task, 0)


def test_it_starts_between_knowing_nothing_and_knowing_it_all(tiny: LoadedModel, task):
    reward = Evaluator(tiny.model, tiny.tokenizer, task, SPEC).run()
    assert 0.12 <= reward <= 0.45
    assert 400_000 < tiny.parameters < 500_000


def test_evaluation_repeats_and_leaves_no_trace(tiny: LoadedModel, task):
    evaluator = Evaluator(tiny.model, tiny.tokenizer, task, job(task=SPELL, learner={"eval_prompts": 64}))
    state = torch.random.get_rng_state()
    assert evaluator.run() == evaluator.run()
    assert torch.equal(state, torch.random.get_rng_state())
    assert evaluator.prompts == 64


def test_the_second_call_finds_it(tiny: LoadedModel):
    before = (tiny.folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model(CACHE) == tiny.folder == resolve("tiny", CACHE)
    assert (tiny.folder / "model.safetensors").stat().st_mtime_ns == before


def test_other_recipes_are_other_folders():
    assert Recipe().digest != dataclasses.replace(Recipe(), seed=2).digest


def test_each_name_is_a_recipe_of_its_own(tmp_path: Path):
    for name, recipe in RECIPES.items():
        (tmp_path / f"tiny-{recipe.digest}").mkdir()
        assert resolve(name, tmp_path) == tmp_path / f"tiny-{recipe.digest}"
    assert len(list(tmp_path.iterdir())) == len(RECIPES)
    assert set(RECIPES) == set(BUILT_IN), "what a job may name"


def test_a_recipe_that_does_not_learn_says_so_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(LearnerError, match="did not reach"):
        tiny_model(tmp_path, dataclasses.replace(Recipe(), max_steps=1))
    assert [p.name for p in tmp_path.iterdir()] == [".tiny.lock"]


def test_tokens_of_prompt_and_answer(tiny: LoadedModel, task):
    tokenizer = tiny.tokenizer
    assert len(tokenizer) == 260
    for index in range(50):
        prompt = task.train(index)
        ids = encode_prompt(tokenizer, prompt)
        assert 5 <= len(ids) <= 7
        assert decode(tokenizer, ids) == prompt.text + "\n"
        answer = tokenizer(prompt.entry["answer"])["input_ids"]
        assert len(answer) == len(prompt.entry["answer"])
        assert decode(tokenizer, [*answer, tokenizer.eos_token_id]) == prompt.entry["answer"]
    odd = "Zürich ≠ 日本 42\n"
    assert decode(tokenizer, tokenizer(odd)["input_ids"]) == odd
    assert build_tokenizer()(odd)["input_ids"] == tokenizer(odd)["input_ids"]


def test_sampled_logprobs_are_those_of_the_model(tiny: LoadedModel, task):
    prompts = [encode_prompt(tiny.tokenizer, task.train(i)) for i in range(20)]
    made = sample(
        tiny.model,
        prompts,
        max_tokens=8,
        temperature=1.0,
        eos=eos_ids(tiny.model, tiny.tokenizer),
        generator=torch.Generator().manual_seed(1),
        max_batch=7,
    )
    assert {c.finish_reason for c in made} >= {"stop"}
    for prompt, completion in zip(prompts, made, strict=True):
        ids = torch.tensor([[*prompt, *completion.ids]])
        with torch.no_grad():
            logits = tiny.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert torch.allclose(own, torch.tensor(completion.logprobs), atol=1e-4)
        assert (completion.ids[-1] == tiny.tokenizer.eos_token_id) == (completion.finish_reason == "stop")


def test_weights_go_out_and_back(tiny: LoadedModel):
    other = load(tiny.folder)
    saved = {name: t + 1 for name, t in unique_weights(tiny.model).items()}
    assert "lm_head.weight" not in saved
    trainer = GRPOTrainer(other.model, job())
    trainer.restore(TrainerState(3, saved, {}))
    assert trainer.steps == 3
    assert torch.equal(other.model.lm_head.weight, saved["model.embed_tokens.weight"])
    with pytest.raises(LearnerError, match="another model"):
        trainer.restore(TrainerState(4, {**saved, "model.norm.weight": torch.zeros(3)}, {}))
    with pytest.raises(LearnerError, match="another model"):
        trainer.restore(TrainerState(4, saved, {"exp_avg/no_such_weight": torch.zeros(3)}))
    assert trainer.steps == 3


def test_assets_are_what_a_node_needs_beside_the_weights(tiny: LoadedModel):
    names = {path.name for path in assets(tiny.folder)}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert not any("safetensors" in name for name in names)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("/no/such/folder", BadInput, "does not exist"),
        ("./nowhere", BadInput, "does not exist"),
        ("not a name!", BadInput, "org/name"),
    ],
)
def test_a_model_that_can_not_be_had(tmp_path: Path, name: str, error, says: str):
    with pytest.raises(error, match=says):
        resolve(name, tmp_path)


def test_a_folder_that_is_no_model(tmp_path: Path):
    with pytest.raises(BadInput, match=r"no config\.json"):
        resolve(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(LearnerError, match="does not load"):
        load(resolve(str(tmp_path), tmp_path))


def test_prompts_that_do_not_fit(tiny: LoadedModel):
    check_lengths(tiny.model, 7, 249)
    with pytest.raises(BadInput, match="256 positions"):
        check_lengths(tiny.model, 7, 250)
