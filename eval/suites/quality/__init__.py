"""Answer quality: questions with known answers, asked with the documents in several orders."""
