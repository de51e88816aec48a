"""held-out prompts that the fleet answers, and what came of them"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision: held-out prompts that the fleet answers, and what came of them."""
    op.create_table(
        "exam_items",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("prompt_index", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("greedy", sa.Boolean(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=True),
        sa.Column("deadline_at", sa.Double(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("rewards", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_exam_items_job_id_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exam_items")),
    )
    op.create_index("ix_exam_items_job_status", "exam_items", ["job_id", "status"])
    op.create_index("ix_exam_items_node", "exam_items", ["node_id"])
    op.add_column("jobs", sa.Column("eval_prompts", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("eval_step", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("exam_step", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("evaluations", sa.Column("by", sa.String(), nullable=False, server_default="learner"))
    op.add_column("evaluations", sa.Column("scores", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    op.drop_column("evaluations", "scores")
    op.drop_column("evaluations", "by")
    for name in ("exam_step", "eval_step", "eval_prompts"):
        op.drop_column("jobs", name)
    op.drop_table("exam_items")
