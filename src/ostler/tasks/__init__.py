"""One piece of work: the queue, the attempts of agents at it, the proof, the review, the retirement."""
