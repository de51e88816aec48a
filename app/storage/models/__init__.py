"""The tables. All state of the control service is here.

Invariant: moments are seconds since the epoch (UTC), money is integer micro-dollars, ledger entries are never changed.
"""

from app.storage.models.access import ApiKey, IdempotencyRecord, WebhookId
from app.storage.models.audits import AuditRow
from app.storage.models.base import Base
from app.storage.models.bills import ProviderBill
from app.storage.models.exams import ExamItem
from app.storage.models.jobs import Evaluation, Event, Job, Step
from app.storage.models.leases import OPEN_STATES, Cooldown, Lease, LeaseState, LedgerEntry, SpotPrice
from app.storage.models.nodes import Node, SnapshotRow
from app.storage.models.outbox import Outbox
from app.storage.models.prompts import GroupPrint, PromptStats
from app.storage.models.twins import Twin
from app.storage.models.work import ItemStatus, Trajectory, WorkItem

__all__ = [
    "OPEN_STATES",
    "ApiKey",
    "AuditRow",
    "Base",
    "Cooldown",
    "Evaluation",
    "Event",
    "ExamItem",
    "GroupPrint",
    "IdempotencyRecord",
    "ItemStatus",
    "Job",
    "Lease",
    "LeaseState",
    "LedgerEntry",
    "Node",
    "Outbox",
    "PromptStats",
    "ProviderBill",
    "SnapshotRow",
    "SpotPrice",
    "Step",
    "Trajectory",
    "Twin",
    "WebhookId",
    "WorkItem",
]
