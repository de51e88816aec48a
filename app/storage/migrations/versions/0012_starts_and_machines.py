"""how far a machine's start has come, and what it has"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def _columns() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("phase", sa.String(), nullable=True),
        sa.Column("phase_detail", sa.Text(), nullable=False, server_default=""),
        sa.Column("phase_since", sa.Double(), nullable=True),
        sa.Column("phase_moved_at", sa.Double(), nullable=True),
        sa.Column("phase_have", sa.BigInteger(), nullable=True),
        sa.Column("phase_total", sa.BigInteger(), nullable=True),
        sa.Column("gpu_ram_mb", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("facts", sa.JSON(), nullable=True),
    )


def upgrade() -> None:
    """Go to this revision: how far a machine's start has come, and what it has."""
    for column in _columns():
        op.add_column("leases", column)


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    for column in reversed(_columns()):
        op.drop_column("leases", column.name)
