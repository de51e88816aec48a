"""notices of providers, notifications to users"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision: notices of providers, notifications to users."""
    op.create_table(
        "outbox",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("event_id", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_outbox_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_outbox")),
    )
    with op.batch_alter_table("outbox", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_outbox_next_at"), ["next_at"], unique=False)
    op.add_column("leases", sa.Column("endangered_since", sa.Double(), nullable=True))


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    op.drop_column("leases", "endangered_since")
    with op.batch_alter_table("outbox", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_outbox_next_at"))

    op.drop_table("outbox")
