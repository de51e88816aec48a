"""what links carry, as measured"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

COLUMNS = {
    "nodes": ("up_measured", "up_used", "down_measured", "down_used"),
    "jobs": ("uplink_measured", "uplink_used"),
}


def upgrade() -> None:
    """Go to this revision: what links carry, as measured."""
    for table, names in COLUMNS.items():
        for name in names:
            op.add_column(table, sa.Column(name, sa.Double(), nullable=True))


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    for table, names in COLUMNS.items():
        for name in reversed(names):
            op.drop_column(table, name)
