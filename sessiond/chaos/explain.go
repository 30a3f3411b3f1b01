package chaos

import (
	"fmt"
	"io"
	"slices"

	"github.com/anishathalye/porcupine"
)

// Explain judges a saved history again and says how far an order of its operations could be found, and which operations then did
// not fit. It knows nothing of the faults of that time.
func Explain(w io.Writer, history io.Reader) error {
	ops, err := readHistory(history)
	if err != nil {
		return err
	}
	judged := prepare(ops, nil)
	result, info := porcupine.CheckOperationsVerbose(model, judged, patience)
	fmt.Fprintf(w, "%d operations, %d of them judged: %s\n", len(ops), len(judged), result)
	if result != porcupine.Illegal {
		return nil
	}
	var longest []porcupine.Operation
	for _, partial := range info.PartialLinearizationsOperations()[0] {
		if len(partial) > len(longest) {
			longest = partial
		}
	}
	placed := map[*input]bool{}
	var s any = state{}
	for i, o := range longest {
		in := as[*input](o.Input)
		placed[in] = true
		_, s = model.Step(s, o.Input, nil)
		if i >= len(longest)-25 {
			fmt.Fprintf(w, "%v\n    then %+v\n", in.Op, s)
		}
	}
	fmt.Fprintln(w, "none of these can come next:")
	var rest []*input
	for _, o := range judged {
		if in := as[*input](o.Input); !placed[in] {
			rest = append(rest, in)
		}
	}
	slices.SortFunc(rest, func(a, b *input) int { return int(a.Return - b.Return) })
	for i, in := range rest {
		if i < 8 || in.Outcome == Unknown {
			fmt.Fprintf(w, "%v (ghost: %v)\n", in.Op, in.ghost)
		}
	}
	return nil
}
