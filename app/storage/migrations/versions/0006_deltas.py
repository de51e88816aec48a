"""deltas of versions, and what they saved"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision: deltas of versions, and what they saved."""
    for name in ("delta_base", "delta_bytes", "delta_chunks"):
        op.add_column("snapshots", sa.Column(name, sa.BigInteger(), nullable=True))
    op.add_column("snapshots", sa.Column("delta_stored", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("snapshots", sa.Column("delta_share", sa.Double(), nullable=True))
    op.add_column("snapshots", sa.Column("delta_note", sa.Text(), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("publish_bytes", sa.BigInteger(), nullable=True))
    for name in ("deltas_applied", "bytes_saved"):
        op.add_column("nodes", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    for name in ("bytes_saved", "deltas_applied"):
        op.drop_column("nodes", name)
    op.drop_column("jobs", "publish_bytes")
    for name in ("delta_note", "delta_share", "delta_stored", "delta_chunks", "delta_bytes", "delta_base"):
        op.drop_column("snapshots", name)
