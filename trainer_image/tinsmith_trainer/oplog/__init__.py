"""The durable log of operations: the journal, its tables, the queues of models, and attempts that ended processes."""
