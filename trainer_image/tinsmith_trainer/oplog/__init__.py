"""The durable log of operations: journal and tables, queues of models, and attempts that ended processes."""
