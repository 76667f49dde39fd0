"""Every rule that refuses a configuration, or fills in what it leaves open."""
