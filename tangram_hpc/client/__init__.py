"""The client: what a trainer's author imports. Talks through a Channel; knows no transport."""
