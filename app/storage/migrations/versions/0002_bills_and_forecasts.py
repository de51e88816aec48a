"""bills of the providers, forecasts over budget"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision: bills of the providers, forecasts over budget."""
    op.create_table(
        "provider_bills",
        sa.Column("lease_id", sa.String(), nullable=False),
        sa.Column("provider", sa.String(), nullable=False),
        sa.Column("micros", sa.BigInteger(), nullable=False),
        sa.Column("through", sa.Double(), nullable=False),
        sa.Column("checked_at", sa.Double(), nullable=False),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.Column("reported_micros", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"], name=op.f("fk_provider_bills_lease_id_leases")),
        sa.PrimaryKeyConstraint("lease_id", name=op.f("pk_provider_bills")),
    )
    with op.batch_alter_table("provider_bills", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_provider_bills_provider"), ["provider"], unique=False)
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.add_column(sa.Column("forecast_over", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_column("forecast_over")
    with op.batch_alter_table("provider_bills", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_provider_bills_provider"))
    op.drop_table("provider_bills")
