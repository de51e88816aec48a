"""What a job's trajectory files are held against when they are read.

Invariant: a reader has a tokenizer of its own: one object of the library may not be used by two threads at once.
"""

from __future__ import annotations

import copy

from app.learner.cache import FileCache
from app.learner.inbox import GroupReader
from app.learner.prepare import Parts
from app.protocol.job import JobSpec
from app.storage.objects import ObjectStore
from app.tasks.prompts import encode_prompt


def open_reader(spec: JobSpec, parts: Parts, objects: ObjectStore, cache: FileCache) -> GroupReader:
    """A reader of the files of one job."""
    tokenizer = copy.deepcopy(parts.loaded.tokenizer)
    return GroupReader(
        objects,
        lambda index: encode_prompt(tokenizer, parts.task.train(index)),
        group_size=spec.batch.group_size,
        max_tokens=spec.sampling.max_tokens,
        vocabulary=parts.loaded.model.get_input_embeddings().num_embeddings,
        quantised=spec.snapshot.quantise,
        proofs=spec.trust.proofs,
        prune=spec.batch.prune,
        cache=cache,
        heldout_ids=lambda index: encode_prompt(tokenizer, parts.task.heldout(index)),
    )
