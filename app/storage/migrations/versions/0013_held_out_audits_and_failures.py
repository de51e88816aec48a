"""held-out answers that are computed again, and groups that nobody can answer"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def _columns() -> list[tuple[str, sa.Column[Any]]]:
    found: list[tuple[str, sa.Column[Any]]] = []
    for table in ("exam_items", "work_items"):
        found.append((table, sa.Column("failures", sa.BigInteger(), nullable=False, server_default="0")))
        found.append((table, sa.Column("failed_by", sa.JSON(), nullable=False, server_default="[]")))
    found.append(("exam_items", sa.Column("trajectory_seq", sa.BigInteger(), nullable=True)))
    found.append(("trajectories", sa.Column("heldout", sa.Boolean(), nullable=False, server_default=sa.false())))
    found.append(("nodes", sa.Column("audit_ungreedy", sa.Double(), nullable=False, server_default="0")))
    found.append(("steps", sa.Column("groups", sa.BigInteger(), nullable=True)))
    return found


def upgrade() -> None:
    """Go to this revision: held-out answers that are computed again, and groups that nobody can answer."""
    for table, column in _columns():
        op.add_column(table, column)


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    for table, column in reversed(_columns()):
        op.drop_column(table, column.name)
