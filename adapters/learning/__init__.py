"""Learning how an unknown application joins documents into its prompts."""
