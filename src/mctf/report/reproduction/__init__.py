"""The paper's tables and figures as a page: experiments that draw, and what all of them found, for people to read."""
