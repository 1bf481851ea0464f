"""One file a schema change, named by its number. A file that was released is never edited."""
