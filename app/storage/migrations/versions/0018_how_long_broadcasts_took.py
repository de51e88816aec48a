"""how long a broadcast took: to the nodes that were there, not to those that came later or never got it"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision. What is on record of older broadcasts is when they were over, which is kept as it is."""
    op.add_column("nodes", sa.Column("version_at", sa.Double(), nullable=True))
    op.add_column("snapshots", sa.Column("broadcast_s", sa.Double(), nullable=True))
    op.execute("UPDATE snapshots SET broadcast_s = completed_at - published_at WHERE version > 0")


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_column("snapshots", "broadcast_s")
    op.drop_column("nodes", "version_at")
