"""The running operator: watches, queue, controller, leader election, and calls to workers."""
