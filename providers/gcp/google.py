"""`ComputeClient` over google-cloud-compute, which is an optional extra and imported only here and only when asked for.

Invariant: Google's own retries are off; its blocking calls run in threads and have deadlines.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

from providers.base import CapabilityError

from .client import ComputeCallError, ComputeClient, InstancePage, Json, Operation

CALL_S = 30.0
PAGE = 500
T = TypeVar("T")


def _reason(error: Any) -> str:
    """Google's word for an error: of the answer's list of errors, else of its details."""
    for one in getattr(error, "errors", None) or ():
        if isinstance(one, dict) and one.get("reason"):
            return str(one["reason"])
    return str(getattr(error, "reason", None) or "")


class _GoogleCompute:
    def __init__(self, project: str, instances: Any, operations: Any) -> None:
        self._types = importlib.import_module("google.cloud.compute_v1")
        self._failures = importlib.import_module("google.api_core.exceptions")
        self._auth = importlib.import_module("google.auth.exceptions")
        self._wire = importlib.import_module("requests.exceptions")
        self._project = project
        self._instances = instances
        self._operations = operations

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(self._translated, work)

    def _translated(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except self._failures.GoogleAPICallError as error:
            status = error.code if isinstance(error.code, int) else getattr(error.code, "value", None)
            raise ComputeCallError(str(error.message), status=status, reason=_reason(error)) from error
        except (self._auth.RefreshError, self._auth.DefaultCredentialsError) as error:
            raise ComputeCallError(str(error), status=401, reason="authError", sent=False) from error
        except (self._wire.ConnectTimeout, self._wire.InvalidURL) as error:
            raise ComputeCallError(type(error).__name__, status=None, sent=False) from error
        except (self._wire.RequestException, self._auth.GoogleAuthError, self._failures.RetryError) as error:
            raise ComputeCallError(type(error).__name__, status=None) from error

    def _operation(self, raw: Any) -> Operation:
        status = getattr(raw.status, "name", raw.status)
        errors = tuple((str(one.code), str(one.message)) for one in raw.error.errors) if raw.error else ()
        return Operation(str(raw.name), str(status) == "DONE", errors)

    def _json(self, raw: Any) -> Json:
        read: Json = json.loads(self._types.Instance.to_json(raw, use_integers_for_enums=False))
        return read

    async def insert(self, zone: str, body: Json, request_id: str) -> Operation:
        resource = self._types.Instance.from_json(json.dumps(body))
        request = self._types.InsertInstanceRequest(
            project=self._project, zone=zone, instance_resource=resource, request_id=request_id
        )
        call = self._instances.insert_unary
        return self._operation(await self._call(lambda: call(request=request, retry=None, timeout=CALL_S)))

    async def operation(self, zone: str, name: str) -> Operation:
        request = self._types.GetZoneOperationRequest(project=self._project, zone=zone, operation=name)
        call = self._operations.get
        return self._operation(await self._call(lambda: call(request=request, retry=None, timeout=CALL_S)))

    async def get(self, zone: str, name: str) -> Json:
        request = self._types.GetInstanceRequest(project=self._project, zone=zone, instance=name)
        call = self._instances.get
        return self._json(await self._call(lambda: call(request=request, retry=None, timeout=CALL_S)))

    async def aggregated_list(self, page_token: str) -> InstancePage:
        request = self._types.AggregatedListInstancesRequest(
            project=self._project, max_results=PAGE, page_token=page_token
        )
        call = self._instances.aggregated_list
        page = await self._call(lambda: next(iter(call(request=request, retry=None, timeout=CALL_S).pages)))
        rows, holes = [], [str(one) for one in page.unreachables]
        for scope, part in page.items.items():
            rows += [self._json(raw) for raw in part.instances]
            if part.warning.code and part.warning.code != "NO_RESULTS_ON_PAGE":
                holes.append(str(scope))
        return InstancePage(tuple(rows), str(page.next_page_token or ""), tuple(holes))

    async def delete(self, zone: str, name: str, request_id: str) -> Operation:
        request = self._types.DeleteInstanceRequest(
            project=self._project, zone=zone, instance=name, request_id=request_id
        )
        call = self._instances.delete_unary
        return self._operation(await self._call(lambda: call(request=request, retry=None, timeout=CALL_S)))

    async def serial_output(self, zone: str, name: str) -> str:
        request = self._types.GetSerialPortOutputInstanceRequest(project=self._project, zone=zone, instance=name)
        call = self._instances.get_serial_port_output
        answer = await self._call(lambda: call(request=request, retry=None, timeout=CALL_S))
        return str(answer.contents)

    async def aclose(self) -> None:
        for client in (self._instances, self._operations):
            await asyncio.to_thread(client.transport.close)


def google_compute(project: str, *, credentials: Any = None) -> ComputeClient:
    """The client over google-cloud-compute. `credentials` None: Google's default ones.

    CapabilityError when the package is not installed, or when there are no credentials.
    """
    try:
        compute = importlib.import_module("google.cloud.compute_v1")
    except ImportError as error:
        raise CapabilityError("Google Cloud needs google-cloud-compute: pip install 'echo2[gcp]'") from error
    auth = importlib.import_module("google.auth.exceptions")
    try:
        instances = compute.InstancesClient(credentials=credentials)
        operations = compute.ZoneOperationsClient(credentials=credentials)
    except auth.DefaultCredentialsError as error:
        raise CapabilityError(f"Google Cloud has no credentials here: {error}") from error
    return _GoogleCompute(project, instances, operations)
