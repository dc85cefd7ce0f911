// Has another checker, Porcupine, judge kept histories: go mod tidy && go run . FILE...
//
// It searches for an order of all operations that each client could have seen, and that a single
// copy of the counter allows. See docs/jepsen.md.
package main

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/anishathalye/porcupine"
)

const patience = 5 * time.Minute // For each search.

var (
	line  = regexp.MustCompile(`^{:process (\d+), :type :(\w+), :f :([\w-]+), :value (.*), :time (\d+), `)
	fence = regexp.MustCompile(`:fence (\d+)`)
	value = regexp.MustCompile(`:value (\d+)`)
)

// An increment, or the read at the end; of either counter.
type input struct {
	f     string
	fence int
}

type output struct {
	how   string // "ok", "fail", or "" if its client was killed: then it may be written or not.
	value int
}

type counter struct{ value, fence int }

// A counter that a write has to add one to, and under a greater fence than the write before.
func model(fenced bool) porcupine.Model {
	nondeterministic := porcupine.NondeterministicModel{
		Init: func() []any { return []any{counter{}} },
		Step: func(before, asked, answered any) []any {
			now, in, out := before.(counter), asked.(input), answered.(output)
			written := []any{counter{now.value + 1, in.fence}}
			allowed := !fenced || in.fence > now.fence
			switch {
			case out.how == "fail":
				return []any{now}
			case out.how == "" && allowed:
				return append(written, now)
			case out.how == "":
				return []any{now}
			case in.f == "read" && out.value == now.value:
				return []any{now}
			case in.f == "increment" && allowed && out.value == now.value+1:
				return written
			}
			return nil
		},
	}
	return nondeterministic.ToModel()
}

func main() {
	status := 0
	for _, path := range os.Args[1:] {
		histories, grants := read(path)
		guarded := porcupine.CheckOperationsTimeout(model(true), histories["fenced"], patience)
		fences := porcupine.CheckOperationsTimeout(leases, grants, patience)
		unguarded := porcupine.CheckOperationsTimeout(model(false), histories["plain"], patience)
		fmt.Printf("%s: under the fence %s, fences of leases %s, without guard %s\n",
			path, guarded, fences, unguarded)
		if guarded != porcupine.Ok || fences != porcupine.Ok {
			status = 1
		}
	}
	os.Exit(status)
}

// A lease gets a greater fence than the lease before.
var leases = porcupine.Model{
	Init: func() any { return 0 },
	Step: func(before, asked, answered any) (bool, any) {
		return answered.(int) > before.(int), answered
	},
}

// The operations on each counter, and the grants.
func read(path string) (map[string][]porcupine.Operation, []porcupine.Operation) {
	file, err := os.Open(path)
	if err != nil {
		panic(err)
	}
	defer file.Close()
	histories, grants := map[string][]porcupine.Operation{}, []porcupine.Operation{}
	begun := map[int]map[string]int{} // By client and operation: where it is in the history.
	asked, held := map[int]int64{}, map[int]int{}
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, math.MaxInt32) // The read at the end is long.
	for lines.Scan() {
		words := line.FindStringSubmatch(lines.Text())
		if words == nil { // Of the nemesis.
			continue
		}
		process, when := number(words[1]), int64(number(words[5]))
		how, f := words[2], words[3]
		if begun[process] == nil {
			begun[process] = map[string]int{}
		}
		verb, which := split(f)
		switch {
		case f == "acquire" && how == "invoke":
			asked[process] = when
		case f == "acquire" && how == "ok":
			held[process] = found(fence, words[4])
			grants = append(grants, porcupine.Operation{
				ClientId: process, Call: asked[process], Return: when, Output: held[process]})
		case which == "":
		case how == "invoke":
			begun[process][f] = len(histories[which])
			histories[which] = append(histories[which], porcupine.Operation{
				ClientId: process, Input: input{verb, held[process]}, Call: when,
				Output: output{}, Return: math.MaxInt64})
		default:
			operation := &histories[which][begun[process][f]]
			operation.Return = when
			operation.Output = output{how, found(value, words[4])}
		}
	}
	return histories, grants
}

var counters = regexp.MustCompile(`^(increment|read)-(plain|fenced)$`)

func split(f string) (string, string) {
	if words := counters.FindStringSubmatch(f); words != nil {
		return words[1], words[2]
	}
	return f, ""
}

func found(pattern *regexp.Regexp, text string) int {
	if words := pattern.FindStringSubmatch(text); words != nil {
		return number(words[1])
	}
	return 0
}

func number(digits string) int {
	n, err := strconv.Atoi(digits)
	if err != nil {
		panic(err)
	}
	return n
}
