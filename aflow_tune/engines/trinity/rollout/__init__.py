"""From a task to experiences: the adapter, the chat model that records, the sampler behind it."""
