"""Settings that a model or a task's files do not allow. Nothing here imports torch."""

from multihop.common.errors import UserError
from multihop.eval.config import EvalConfig
from multihop.eval.document_context import check_documents
from multihop.eval.known_tasks import load_task, located


def check_settings(config: EvalConfig, layers: int) -> None:
    """Refuse features that the model lacks, and document context where there are no documents.

    A task's files are read for its document context alone. Set for all tasks it is for those of tagging.

    Args:
        layers: of the model that is evaluated.

    Raises:
        UserError: one of the settings is impossible, or a task's files are missing or damaged.
    """
    for section in (config, *config.tasks):
        if section.features is not None:
            section.features.indexes(layers)
    for asked in config.tasks:
        own = asked.document_context
        if own if own is not None else config.document_context:
            task = load_task(located(asked.name), config.data_dir)
            if task.kind == "tagging":
                check_documents(task)
            elif own:
                raise UserError(
                    f"document_context=true is for tagging, and the kind of task {task.name} is {task.kind}; remove it"
                )
