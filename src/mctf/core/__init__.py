"""Pure functions on tensors: criteria, matching, assignment, attention, schedule, cost. No models in here."""
