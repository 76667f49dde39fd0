"""From a task to experiences: the adapter, the recording chat model, the samplers behind it."""
