"""how fast a node is by what it hands in"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def _columns() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("rollouts_delivered", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("waited_s", sa.Double(), nullable=False, server_default="0"),
        sa.Column("evidence", sa.JSON(), nullable=True),
    )


def upgrade() -> None:
    """Go to this revision: how fast a node is by what it hands in."""
    for column in _columns():
        op.add_column("nodes", column)


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    for column in reversed(_columns()):
        op.drop_column("nodes", column.name)
