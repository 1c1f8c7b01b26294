"""The durable log of operations: journal, its tables, the queues of models, and how often a process ended at one."""
