"""The durable log of operations: the journal and its tables, the queues of models, attempts that ended processes."""
