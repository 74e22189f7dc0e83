"""Evaluation: tasks, the model under test, metrics, trials and their statistics, and reports.

The subpackages from the bottom: tasks (official files) and model (the model under test), metrics and inference,
finetune, zero_shot and statistics, trials, report. Each imports only those below it.
"""
