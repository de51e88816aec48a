"""Google Cloud's Spot VMs. Invariant: importing this needs nothing of Google's; only `google_compute` does."""

from .adapter import Gcp
from .client import ComputeCallError, ComputeClient, InstancePage, Operation
from .google import google_compute
from .payload import Shape

__all__ = ["ComputeCallError", "ComputeClient", "Gcp", "InstancePage", "Operation", "Shape", "google_compute"]
