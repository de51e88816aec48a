"""indexes of the hot paths: waiting work in its order, the newest spot prices"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision: a look for work costs the same after a hundred thousand items as after ten."""
    op.drop_index("ix_work_items_job_status", table_name="work_items")
    op.create_index("ix_work_items_job_status", "work_items", ["job_id", "status", "ordinal"])
    op.drop_index("ix_spot_prices_provider", table_name="spot_prices")
    op.create_index("ix_spot_prices_provider", "spot_prices", ["provider", "received_at"])


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_index("ix_spot_prices_provider", table_name="spot_prices")
    op.create_index("ix_spot_prices_provider", "spot_prices", ["provider"])
    op.drop_index("ix_work_items_job_status", table_name="work_items")
    op.create_index("ix_work_items_job_status", "work_items", ["job_id", "status"])
