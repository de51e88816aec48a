"""Which object store a learner works with.

Invariant: it is the one that the control service keeps the job's objects in, or there is an error that says so.
"""

from __future__ import annotations

from app.learner.config import LearnerSettings
from app.protocol.errors import BadInput
from app.protocol.learner import StartAnswer
from app.storage.objects import ObjectStore
from app.storage.stores import open_store, parse_folder_url


def open_objects(settings: LearnerSettings, answer: StartAnswer) -> ObjectStore:
    """The object store of the settings, else the one that the control service names, else a folder of our own.

    Raises BadInput for a folder that is on another machine: nothing that is put there would ever be found.
    """
    url, endpoint = settings.object_store_url, settings.s3_endpoint_url
    if not url and answer.object_store_url:
        url, endpoint = answer.object_store_url, endpoint or answer.s3_endpoint_url
        if url.startswith("file:") and not parse_folder_url(url).is_dir():
            raise BadInput(
                f"the control service keeps its objects in the folder {url}, which is not on this machine: start the "
                "learner there, or let ECHO2_OBJECT_STORE_URL of the control service be an s3:// URL"
            )
    return open_store(url or settings.objects_url, endpoint_url=endpoint)
