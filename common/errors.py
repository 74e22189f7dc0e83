"""The error that commands report in one sentence."""


class UserError(ValueError):
    """A mistake in what the user gave: a recipe, an option, a file. Its message is a sentence for the user.

    Commands print the message and exit with code 2. Any other exception is a traceback and exit code 1.
    """
