"""what was agreed with hosts, what they announce, when they end"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision: what was agreed with hosts, what they announce, when they end."""
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.add_column(sa.Column("agreed_micros_h", sa.BigInteger(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("start_micros_h", sa.BigInteger(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("host_ends_at", sa.Double(), nullable=True))
        batch_op.add_column(sa.Column("announced_micros_h", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("announced_id", sa.String(), nullable=True))


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    with op.batch_alter_table("leases", schema=None) as batch_op:
        for name in ("announced_id", "announced_micros_h", "host_ends_at", "start_micros_h", "agreed_micros_h"):
            batch_op.drop_column(name)
