"""What a person writes for the planner: model and hardware files, histories, its settings."""
