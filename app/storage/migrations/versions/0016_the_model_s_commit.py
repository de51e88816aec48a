"""the commit of a model from the Hugging Face Hub"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision: a learner that starts again loads the same model, whatever the Hub's main is then."""
    op.add_column("jobs", sa.Column("model_revision", sa.String(), nullable=True))


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_column("jobs", "model_revision")
