"""Evaluation: tasks, what is judged, metrics, trials and their statistics, and reports.

The rooms from the bottom: tasks (official files) and model (what is judged), metrics and inference, finetune, zero_shot
and statistics, trials, report. Each imports only those below it.
"""
