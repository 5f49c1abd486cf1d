"""Other people's models on this attention: a module for each library, which is imported when its module is used."""
