"""Learning how an application joins documents into its prompts."""
