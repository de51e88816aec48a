"""how long a broadcast took: to the nodes that were there, not to those that came later or never got it"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

OPEN = sa.text("completed_at IS NULL")


def upgrade() -> None:
    """Go to this revision. What is on record of older broadcasts is when they were over, which is kept as it is."""
    op.add_column("nodes", sa.Column("versions_at", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("snapshots", sa.Column("broadcast_s", sa.Double(), nullable=True))
    op.execute("UPDATE snapshots SET broadcast_s = completed_at - published_at WHERE version > 0")
    op.create_index("ix_snapshots_open", "snapshots", ["job_id"], sqlite_where=OPEN, postgresql_where=OPEN)


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_index("ix_snapshots_open", "snapshots")
    op.drop_column("snapshots", "broadcast_s")
    op.drop_column("nodes", "versions_at")
