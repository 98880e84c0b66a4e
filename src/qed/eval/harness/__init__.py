"""The lm-eval harness on our checkpoints: its own tasks, versions and scores, with our batches and your files.

| module | what |
|---|---|
| `suites` | the table of suites: tasks that papers report together |
| `model` | our model as a language model of lm-eval: packed, with shared contexts, resumable |
| `tasks` | lm-eval's tasks, with examples from your files in place of a hub's data sets |
| `ruler` | RULER's prompts, drawn by lm-eval's own code, frozen, and never longer than asked |
| `running` | one task after the other, each result kept as it comes |
"""
