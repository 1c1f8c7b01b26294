"""The running operator: watches, queue, controller, leader, and what asks workers."""
