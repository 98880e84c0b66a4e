"""From numbers to a page: tables, figures, sentences, and the files of `qed report`."""
